"""How models are asked: engines in SGLang's dialect, judges, and a scripted engine for tests."""
