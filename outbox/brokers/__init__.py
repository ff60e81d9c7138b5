"""What stands between the extension and a broker: sending to it, and seeing what it holds."""
