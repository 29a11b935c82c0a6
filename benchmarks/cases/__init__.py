"""One module per case, each with ``run(context)`` that yields results."""
