"""What the frozen encoders give, computed once and kept on disk: prompts and image latents."""
