"""Splitting the products inside a layer over ranks."""
