"""Structured output: the grammar that an answer is restricted to, and its masks over tokens."""
