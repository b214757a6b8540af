"""`w4a4 bench`: how fast a whole model runs, beside what people would run instead."""
