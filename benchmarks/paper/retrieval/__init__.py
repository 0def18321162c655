"""Memory retrieval: accuracy of memories on damaged queries."""
