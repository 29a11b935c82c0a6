"""The router: registry of workers, prefix-aware dispatch with retry, and its control socket."""
