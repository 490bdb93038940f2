"""The APIs that clients speak: Chat Completions, Responses and Messages."""
