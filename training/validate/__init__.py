"""What can be wrong with a recipe, reported before anything heavy is imported."""
