"""Loops that others wrote, fed by the stream: a module for each of their libraries, which it imports."""
