"""The ops in plain torch: token by token (the definition) and chunk by chunk (the CPU path)."""
