"""What can be wrong with a recipe, told before anything heavy is imported."""
