"""The model behind an address of its own, for programs that bring their own loop (`server`)."""
