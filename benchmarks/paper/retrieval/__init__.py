"""Memory retrieval: accuracy of memories on corrupted queries."""
