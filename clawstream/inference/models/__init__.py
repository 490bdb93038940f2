"""What a model's folder says of the model."""
