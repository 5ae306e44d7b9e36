"""The aggregator as a process: it leads or follows, with sockets, threads, the lease and reports."""
