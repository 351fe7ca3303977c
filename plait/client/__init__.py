"""The client: sending, consuming, reading and administering."""
