"""What may be asked: errors, architectures, recipes and model aliases. Imports nothing else of ours."""
