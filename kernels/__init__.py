"""What every operation means (`reference`), how weights are packed (`packing`), how it is fast (`*_sm90`)."""
