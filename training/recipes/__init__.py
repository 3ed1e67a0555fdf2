"""The built-in recipes, and how any recipe is read and checked before torch is imported."""
