"""How models are asked: engines in SGLang's dialect, judges and teachers."""
