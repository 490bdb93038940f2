"""The optimizer's steps on one batch: losses, advantages, packing."""
