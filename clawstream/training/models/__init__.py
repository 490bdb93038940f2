"""The model in the trainer's hands, and its versions as folders."""
