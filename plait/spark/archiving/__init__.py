"""archiving."""
