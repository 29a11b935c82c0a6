"""kvcore: the KV cache of LLM inference as pages that are shared, tiered, compressed and streamed.

Importing this package does no work: submodules (``kvcore.pages``, ...) load on first use.
"""

__version__ = "0.1.0"
