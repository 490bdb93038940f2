"""A Hugging Face causal model on Megatron-Core: cut over processes by tensor, by pipeline stage and by data.

Kept apart because megatron-core is an extra. `shape` and `names` say what a model is and where its tensors go; `layers`
and `vocabulary` compute; `weights` reads and writes; `model` is what a trainer sees.
"""
