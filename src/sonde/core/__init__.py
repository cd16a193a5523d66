"""Plain numbers and types that the recording and the reading side share. No torch."""
