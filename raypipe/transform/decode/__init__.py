"""Decoders: stored bytes → pixels.

rgb              any image → uint8 (H, W, 3)
array            any image or array → (H, W, C) in the stored dtype, `transform.decode: array`
jpeg             a JPEG: the whole, or only the box that a crop shows
pillow_images    the kinds that Pillow decodes
image_header     kinds and sizes of images, by their headers; jpeg_header: those of JPEGs
limits           how much memory and time one image may take
"""
