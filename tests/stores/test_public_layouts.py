"""Layouts of public data sets, as folder, tar and zip: each is read right, or refused by the names in it."""

from __future__ import annotations

import itertools
import logging
import re
import shutil
from pathlib import Path

import pytest
from refused import store_refused

from raypipe.errors import StoreError
from raypipe.stores import open_store
from raypipe.stores.sources import open_source

CAT_DOG = ("cat", "dog")
SPLITS = "which are splits, not classes"
LABELS = r"all 2 samples have the class {}, and their labels may be in .*{}"
FLAT = "has 2 images and no class folders"

# Name → files, where {a,b} stands for both and a / at the end for an empty folder; and class names, or the error.
LAYOUTS: dict[str, tuple[str, tuple[str, ...] | str]] = {
    "ImageNet": (
        "ILSVRC/Data/CLS-LOC/{train,val,test}/n01/{0,1}.JPEG ILSVRC/Annotations/0.xml",
        f"CLS-LOC/test, .*CLS-LOC/train.*{SPLITS}",
    ),
    "ImageNet, train": ("{n01440764,n01443537}/{0,1}.JPEG", ("n01440764", "n01443537")),
    "ImageNet, val": ("ILSVRC2012_val_{0,1}.JPEG", FLAT),
    "Tiny ImageNet": (
        "{train,val,test}/images/{0,1}.JPEG wnids.txt words.txt",
        SPLITS,
    ),
    "Tiny ImageNet, train": (
        "{n01,n02}/images/{0,1}.JPEG {n01,n02}/boxes_.txt",
        ("n01", "n02"),
    ),
    "Tiny ImageNet, val": (
        "images/{0,1}.JPEG val_annotations.txt",
        LABELS.format("images", r"val_annotations\.txt"),
    ),
    "CIFAR as PNG": ("{train,test}/{cat,dog}/0.png labels.txt", SPLITS),
    "CIFAR-100, a class train": (
        "{train,tractor,tank}/{0,1}.png",
        ("tank", "tractor", "train"),
    ),
    "MNIST as PNG": ("{training,testing}/{0,1}/{1,2}.png", SPLITS),
    "MNIST, one split": ("{0,1,2}/{0,1,2}.png", ("0", "1", "2")),
    "Places365, train": (
        "data_large_standard/a/{abbey,airfield}/0.jpg data_large_standard/b/{bar,beach}/0.jpg",
        "data_large_standard/a, data_large_standard/b, which are the first letters",
    ),
    "SUN397": (
        "a/{abbey,alley}/0.jpg b/bar/0.jpg ClassName.txt",
        "a, b, which are the first letters",
    ),
    "iNaturalist 2018": (
        "train_val2018/{Aves,Plantae}/{1,2}/0.jpg train2018.json",
        r"Aves, .*Plantae, which all have the folders 1, 2",
    ),
    "Food-101": (
        "images/{apple_pie,waffles}/0.jpg meta/{train,test,classes}.txt README.txt",
        ("apple_pie", "waffles"),
    ),
    "Flowers-102": (
        "jpg/image_{0,1}.jpg imagelabels.mat setid.mat",
        LABELS.format("jpg", r"imagelabels\.mat"),
    ),
    "Oxford Pets": (
        "images/Abyssinian_{1,2}.jpg annotations/trimaps/Abyssinian_{1,2}.png annotations/list.txt",
        "annotations, images, which look like images and their labels",
    ),
    "Oxford Pets, lists only": (
        "images/Abyssinian_{1,2}.jpg annotations/{list,trainval,test}.txt",
        LABELS.format("images", "annotations/"),
    ),
    "Stanford Cars": ("cars_{train,test}/{0,1}.jpg devkit/cars_meta.mat", SPLITS),
    "Caltech-101": (
        "101_ObjectCategories/{BACKGROUND_Google,anchor}/0.jpg Annotations/anchor/0.mat",
        ("BACKGROUND_Google", "anchor"),
    ),
    "VOC": (
        "VOC2012/JPEGImages/{0,1}.jpg VOC2012/Annotations/0_.xml VOC2012/SegmentationClass/0.png",
        "JPEGImages, VOC2012/SegmentationClass, which look like images and their labels",
    ),
    "VOC, detection": (
        "JPEGImages/{0,1}.jpg Annotations/{0,1}.xml ImageSets/Main/train.txt",
        LABELS.format("JPEGImages", "Annotations/, ImageSets/"),
    ),
    "COCO": (
        "{train2017,val2017}/{0,1}.jpg annotations/instances_train2017.json",
        SPLITS,
    ),
    "Open Images": ("{train,validation,test}/{0,1}.jpg class-descriptions.csv", SPLITS),
    "Open Images, one split": (
        "train/data/{0,1}.jpg train/labels/detections.csv train/metadata/classes.csv",
        LABELS.format("data", "train/labels/, train/metadata/"),
    ),
    "CelebA": (
        "img_align_celeba/{0,1}.jpg list_attr_celeba.txt identity_CelebA.txt",
        LABELS.format("img_align_celeba", r"list_attr_celeba\.txt"),
    ),
    "FFHQ": (
        "images1024x1024/00000/{00000,00001}.png images1024x1024/01000/{01000,01001}.png ffhq-dataset-v2.json",
        "00000, 01000, which number their images",
    ),
    "LSUN as files": ("{bedroom_train,bedroom_val}/{0,1}.webp", SPLITS),
    "ISIC, splits": (
        "ISIC2018_Task3_{Training,Test,Validation}_Input/{0,1}.jpg",
        SPLITS,
    ),
    "HAM10000": (
        "HAM10000_images_part_{1,2}/{0,1}.jpg HAM10000_metadata.csv",
        "which look like images and their labels, or parts of them",
    ),
    "ChestX-ray14": (
        "images_{001,002}/images/{0,1}.png Data_Entry_2017.csv train_val_list.txt",
        "images_001, images_002, which look like images and their labels",
    ),
    "COVID radiography": (
        "{COVID,Normal}/{images,masks}/0.png COVID.metadata.xlsx",
        "COVID, Normal, which all have the folders images, masks",
    ),
    "Kaggle, cats and dogs": (
        "train/{cat.0,dog.0}.jpg test1/{1,2}.jpg sampleSubmission.csv",
        SPLITS,
    ),
    "PetImages": (
        "PetImages/{Cat,Dog}/{0,1}.jpg PetImages/{Cat,Dog}/Thumbs.db readme.txt",
        ("Cat", "Dog"),
    ),
    "Intel": (
        "seg_train/seg_train/{forest,sea}/0.jpg seg_test/seg_test/{forest,sea}/0.jpg seg_pred/seg_pred/0.jpg",
        SPLITS,
    ),
    "GTSRB": (
        "Final_{Training,Test}/Images/{00000,00001}/1.png Final_Training/Images/00000/GT-00000.csv",
        SPLITS,
    ),
    "GTSRB on Kaggle": ("{Train,Test,Meta}/{0,1}.png {Train,Test}.csv", SPLITS),
    "Roboflow, YOLO": (
        "{train,valid,test}/images/0.jpg {train,valid,test}/labels/0.txt data.yaml",
        SPLITS,
    ),
    "Roboflow, COCO": (
        "{train,valid}/{0,1}.jpg {train,valid}/_annotations.coco.json",
        SPLITS,
    ),
    "Roboflow, one split": ("{0,1}.jpg _classes.csv", FLAT),
    "YOLO, by kind": (
        "images/{train,val}/{0,1}.jpg labels/{train,val}/{0,1}.txt",
        SPLITS,
    ),
    "Cityscapes": (
        "leftImg8bit/{train,val}/{bern,ulm}/0.png gtFine/{train,val}/{bern,ulm}/0.png",
        SPLITS,
    ),
    "Cityscapes, one split": (
        "leftImg8bit/bern/{0,1}.png gtFine/bern/{0,1}.png",
        "gtFine, leftImg8bit, which look like images and their labels",
    ),
    "ADE20K": (
        "{images,annotations}/{training,validation}/{0,1}.png objectInfo150.txt",
        SPLITS,
    ),
    "MVTec AD": (
        "{bottle,cable}/{train,test}/{good,bent}/0.png {bottle,cable}/ground_truth/bent/0.png",
        f"bottle/test, bottle/train.*{SPLITS}",
    ),
    "MVTec AD, one object": (
        "train/good/{0,1}.png test/{good,bent}/0.png ground_truth/bent/0_mask.png license.txt",
        SPLITS,
    ),
    "Market-1501": (
        "bounding_box_{train,test}/{0,1}.jpg query/0.jpg gt_bbox/0.jpg readme.txt",
        SPLITS,
    ),
    "PlantVillage": (
        "PlantVillage/{color,grayscale,segmented}/{Apple___scab,Tomato___rot}/0.jpg",
        "grayscale, PlantVillage/segmented, which all have the folders Apple___scab, Tomato___rot",
    ),
    "FER2013 by usage": ("{Training,PublicTest,PrivateTest}/{0,1}/1.png", SPLITS),
    "AffectNet": (
        "{train_set,val_set}/images/{0,1}.jpg train_set/annotations/0_exp.npy",
        SPLITS,
    ),
    "imagefolder with metadata": (
        "train/{0,1}.png train/metadata.jsonl",
        LABELS.format("train", r"train/metadata\.jsonl"),
    ),
    "Kaggle, labels.csv": (
        "train/{0,1}.jpg labels.csv",
        LABELS.format("train", r"labels\.csv"),
    ),
    "PACS": (
        "{art_painting,photo,sketch}/{dog,horse}/0.jpg",
        "which all have the folders dog, horse",
    ),
    "horse2zebra": ("{trainA,trainB,testA,testB}/0.jpg", SPLITS),
    "a class of XML": (
        "{cat,dog}/0.jpg xml/{0,1}.xml",
        "the folder xml, with 2 .xml and no image",
    ),
    "Street View House Numbers": ("{train,test,extra}/{1,2}.png", SPLITS),
    "trainval and test": ("{trainval,test}/{cat,dog}/0.jpg", SPLITS),
    "a holdout": ("{train,holdout}/{cat,dog}/0.jpg", SPLITS),
    "masked faces": (
        "{with_mask,without_mask}/{0,1}.jpg",
        ("with_mask", "without_mask"),
    ),
    "one class, and nothing else": ("cat/{0,1}.jpg README.md LICENSE", ("cat",)),
    "class folders beside a list": ("{cat,dog}/0.jpg labels.csv", CAT_DOG),
    "stations and tubes": (
        "{train_station,test_tube,sea}/0.jpg",
        ("sea", "test_tube", "train_station"),
    ),
}


def files_of(pattern: str) -> list[str]:
    """The files of a layout: each part with all of the names that its braces stand for."""
    every = list[str]()
    for part in pattern.split():
        pieces = [
            piece[1:-1].split(",") if piece[:1] == "{" else [piece]
            for piece in re.split(r"(\{[^}]*\})", part)
        ]
        every += map("".join, itertools.product(*pieces))
    return every


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_public_layout_is_read_right_or_refused_by_name(
    layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pattern, expected = LAYOUTS[layout]
    root = tmp_path / "root"
    for name in files_of(pattern):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"picture")
    for form in ("tar", "zip"):
        shutil.make_archive(str(tmp_path / "a"), form, root)
    if isinstance(expected, tuple):
        with caplog.at_level(logging.WARNING):
            for path in (root, tmp_path / "a.tar"):
                assert open_store(path).classes == expected
        source = open_source(tmp_path / "a.zip")
        assert source is not None and source.classes == expected
        if len(expected) == 1:
            assert f"all 2 samples have the class {expected[0]}" in caplog.text
        return
    store_refused(expected, root)
    is_flat = expected == FLAT  # archives name their other layouts too
    for open_archive, name in ((open_store, "a.tar"), (open_source, "a.zip")):
        with pytest.raises(StoreError, match="has no labels" if is_flat else expected):
            len(open_archive(tmp_path / name))  # type: ignore[arg-type]
