"""The hook on a DistributedDataParallel: `attach`, what is at work behind it, what it saves."""
