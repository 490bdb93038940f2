"""How an engine is asked, in SGLang's dialect, and what it answers."""
