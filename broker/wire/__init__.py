"""The wire format: messages, their bytes, tensors and names. Pure."""
