"""A libllama that moves a running context to another split mode by a call of its own."""
