"""What goes into the core and comes out of it: settings, events and actions. Pure."""
