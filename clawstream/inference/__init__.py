"""How models are asked: engines in SGLang's dialect, chat templates, and a scripted engine for tests."""
