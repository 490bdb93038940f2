"""A Hugging Face causal model on Megatron-Core: cut over processes by tensor, by pipeline stage and by data.

Kept apart because megatron-core is an extra. `shape` says what a model is; `layers` and `reducing` compute;
`weights` reads and writes; `model` is what a trainer sees.
"""
