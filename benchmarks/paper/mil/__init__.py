"""Multiple-instance learning: AUC of bag poolings."""
