"""How models are asked: engines in SGLang's dialect or vLLM's, judges and teachers."""
