"""Bridges to inference libraries; each package here imports the library it is named after."""
