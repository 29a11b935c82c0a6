"""The HTTP front, the launcher of local workers and the demo."""
