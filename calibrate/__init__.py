"""What the activations look like: sources, text, statistics, permutations, precision maps, report."""
