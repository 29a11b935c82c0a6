"""Workers: an engine that schedules, computes and samples over pages, and the process around it.

``request`` (what is asked and answered), ``memory`` (pages of sequences),
``scheduler`` and ``engine`` hold no socket or thread; ``handoff`` adds the prefill and decode roles
over a stream; ``loop`` is the engine's thread, ``process`` its connection to the router.
"""
