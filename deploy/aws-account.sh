#!/usr/bin/env bash
# Once per AWS account and region: the two roles and the security group that cluster.yaml names. Run again, it brings
# them up to date: SSH is then let in from the network that is given now.
#
#   bash deploy/aws-account.sh BUCKET CIDR [CLUSTER]
#
# BUCKET   holds the stores and the runs; nodes may read and write it, and no other
# CIDR     from where SSH is let in, e.g. 203.0.113.7/32
# CLUSTER  the cluster_name of cluster.yaml; the head may start and end machines of that cluster, and no others
set -euo pipefail
bucket=${1:?the bucket of the stores and runs} cidr=${2:?from where SSH is let in, e.g. 203.0.113.7/32}
cluster=${3:-raypipe}
account=$(aws sts get-caller-identity --query Account --output text)

data='{"Effect": "Allow", "Action": ["s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject",
       "s3:AbortMultipartUpload", "s3:ListBucketMultipartUploads", "s3:ListMultipartUploadParts"],
       "Resource": ["arn:aws:s3:::'$bucket'", "arn:aws:s3:::'$bucket'/*"]}'
pull='{"Effect": "Allow", "Action": ["ecr:GetAuthorizationToken", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
       "Resource": "*"}'
# The head looks up machines and the latest machine image, and gives nodes their role. It starts machines that get the
# cluster's name as a tag with their start, and IMDSv2; it ends and tags those alone that have that tag.
machines='"Resource": "arn:aws:ec2:*:'$account':instance/*"'
its='{"aws:ResourceTag/ray-cluster-name": "'$cluster'"}'
new='{"aws:RequestTag/ray-cluster-name": "'$cluster'"'
nodes='{"Effect": "Allow", "Action": ["ec2:Describe*", "ssm:GetParameters"], "Resource": "*"},
       {"Effect": "Allow", "Action": "iam:PassRole", "Resource": "arn:aws:iam::'$account':role/raypipe-node",
        "Condition": {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}},
       {"Effect": "Allow", "Action": "ec2:RunInstances", "NotResource": "arn:aws:ec2:*:*:instance/*"},
       {"Effect": "Allow", "Action": "ec2:RunInstances", '$machines',
        "Condition": {"StringEquals": '$new', "ec2:MetadataHttpTokens": "required"}}},
       {"Effect": "Allow", "Action": "ec2:CreateTags", '$machines',
        "Condition": {"StringEquals": '$new', "ec2:CreateAction": "RunInstances"}}},
       {"Effect": "Allow", "Action": ["ec2:TerminateInstances", "ec2:CreateTags"], '$machines',
        "Condition": {"StringEquals": '$its'}}'
trust='{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"},
        "Action": "sts:AssumeRole"}]}'

unless() { # ERROR COMMAND…: run the command; that it was done before, which AWS says by ERROR, is no failure
    local error
    error=$("${@:2}" 2>&1 >/dev/null) || [[ $error == *"$1"* ]] || { echo "$error" >&2; exit 1; }
}
role() { # NAME STATEMENTS
    unless EntityAlreadyExists aws iam create-role --role-name "$1" --assume-role-policy-document "$trust"
    aws iam put-role-policy --role-name "$1" --policy-name raypipe \
        --policy-document '{"Version": "2012-10-17", "Statement": ['"$2"']}'
    unless EntityAlreadyExists aws iam create-instance-profile --instance-profile-name "$1"
    # A profile has room for one role: the limit is reached where it has this one.
    unless LimitExceeded aws iam add-role-to-instance-profile --instance-profile-name "$1" --role-name "$1"
}
role raypipe-node "$data, $pull"
role raypipe-head "$data, $pull, $nodes"

# Of the first spot node of an account; where it is there already, AWS says so.
aws iam create-service-linked-role --aws-service-name spot.amazonaws.com >/dev/null 2>&1 || true

vpc=$(aws ec2 describe-vpcs --filters Name=is-default,Values=true --query 'Vpcs[0].VpcId' --output text)
unless InvalidGroup.Duplicate aws ec2 create-security-group --group-name raypipe --vpc-id "$vpc" \
    --description 'raypipe: all within the group, SSH from one network'
group=$(aws ec2 describe-security-groups --filters Name=group-name,Values=raypipe "Name=vpc-id,Values=$vpc" \
    --query 'SecurityGroups[0].GroupId' --output text)
ssh='{"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "'$cidr'"}]}'
for rule in '{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "'$group'"}]}' "$ssh"; do
    unless InvalidPermission.Duplicate aws ec2 authorize-security-group-ingress --group-id "$group" \
        --ip-permissions "[$rule]"
done
# What leaves for the group itself, beside the rule for all addresses that a group has from its beginning: EFA, which
# deploy/aws-p5.yaml asks for, has none. https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/create-efa.html
unless InvalidPermission.Duplicate aws ec2 authorize-security-group-egress --group-id "$group" \
    --ip-permissions '[{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "'$group'"}]}]'
# Networks of earlier runs of this script.
for earlier in $(aws ec2 describe-security-groups --group-ids "$group" --output text \
    --query 'SecurityGroups[0].IpPermissions[?FromPort==`22`][].IpRanges[].CidrIp'); do
    if [[ $earlier != "$cidr" ]]; then
        aws ec2 revoke-security-group-ingress --group-id "$group" --ip-permissions "[${ssh/"$cidr"/"$earlier"}]" >/dev/null
    fi
done
echo "roles raypipe-head and raypipe-node for s3://$bucket; security group $group, SSH from $cidr"
