#!/usr/bin/env bash
# Once per AWS account and region: the two roles and the security group that cluster.yaml names.
#
#   bash deploy/aws-account.sh BUCKET CIDR
#
# BUCKET  holds the stores and the runs; nodes may read and write it, and no other
# CIDR    from where SSH is let in, e.g. 203.0.113.7/32
set -euo pipefail
bucket=${1:?the bucket of the stores and runs} cidr=${2:?from where SSH is let in, e.g. 203.0.113.7/32}
account=$(aws sts get-caller-identity --query Account --output text)

data='{"Effect": "Allow", "Action": ["s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject",
       "s3:AbortMultipartUpload", "s3:ListBucketMultipartUploads", "s3:ListMultipartUploadParts"],
       "Resource": ["arn:aws:s3:::'$bucket'", "arn:aws:s3:::'$bucket'/*"]}'
pull='{"Effect": "Allow", "Action": ["ecr:GetAuthorizationToken", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
       "Resource": "*"}'
# The head starts and ends nodes, gives them their role, and looks up the latest machine image.
nodes='{"Effect": "Allow", "Action": ["ec2:Describe*", "ec2:RunInstances", "ec2:TerminateInstances",
        "ec2:CreateTags", "ssm:GetParameters"], "Resource": "*"},
       {"Effect": "Allow", "Action": "iam:PassRole", "Resource": "arn:aws:iam::'$account':role/raypipe-node"}'
trust='{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"},
        "Action": "sts:AssumeRole"}]}'

role() { # NAME STATEMENTS
    aws iam create-role --role-name "$1" --assume-role-policy-document "$trust" >/dev/null
    aws iam put-role-policy --role-name "$1" --policy-name raypipe \
        --policy-document '{"Version": "2012-10-17", "Statement": ['"$2"']}'
    aws iam create-instance-profile --instance-profile-name "$1" >/dev/null
    aws iam add-role-to-instance-profile --instance-profile-name "$1" --role-name "$1"
}
role raypipe-node "$data, $pull"
role raypipe-head "$data, $pull, $nodes"

# Of the first spot node of an account; where it is there already, AWS says so.
aws iam create-service-linked-role --aws-service-name spot.amazonaws.com >/dev/null 2>&1 || true

vpc=$(aws ec2 describe-vpcs --filters Name=is-default,Values=true --query 'Vpcs[0].VpcId' --output text)
group=$(aws ec2 create-security-group --group-name raypipe --vpc-id "$vpc" --query GroupId --output text \
    --description 'raypipe: all within the group, SSH from one network')
aws ec2 authorize-security-group-ingress --group-id "$group" --protocol all --source-group "$group" >/dev/null
aws ec2 authorize-security-group-ingress --group-id "$group" --protocol tcp --port 22 --cidr "$cidr" >/dev/null
echo "roles raypipe-head and raypipe-node for s3://$bucket; security group $group, SSH from $cidr"
