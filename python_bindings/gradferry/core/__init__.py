"""What every hook stands on: options and codecs, agreement between ranks, connections, engines."""
