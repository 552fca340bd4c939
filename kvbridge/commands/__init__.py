"""The commands of `kvbridge`, one module each; `kvbridge.cli` joins them."""
