"""Data: what users hand over, toy sets, augmentation and corruptions. Nothing downloads on import."""
