"""The meta server's part: who serves which subject, and who consumes which part of it. Decisions and their store."""
