"""The contract between processes: messages, their bytes, tensors, names and errors. Pure."""
