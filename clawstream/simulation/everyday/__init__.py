"""Everyday requests in English, how their answers may be wanted, and whether an answer is as wanted."""
