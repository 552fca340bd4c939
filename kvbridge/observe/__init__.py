"""What a node shows of itself: the journal's file and metrics."""
