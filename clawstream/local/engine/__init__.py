"""The embedded CPU engine: SGLang's native dialect over torch and transformers, in a process of its own.

With it the whole pipeline runs, exactly, on a laptop. One worker thread owns the model and its state; the event loop
only queues commands and hands out the tokens that the worker sampled.
"""
