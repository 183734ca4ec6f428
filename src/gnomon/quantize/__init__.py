"""Making models smaller, and measuring what that costs."""
