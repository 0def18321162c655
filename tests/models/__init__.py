"""Which models of other libraries adapt_ reaches, and whether they keep their outputs."""
