"""Agent programs in a virtual environment of their own (--agent-python): other libraries' environments among them."""
