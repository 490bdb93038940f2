"""One trainer in several processes of this machine: starting them, and a model that FSDP2 cuts over them."""
